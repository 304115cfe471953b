"""Plans that mix styles: each module has separate devices, or shares devices on quotas or in
turns."""
