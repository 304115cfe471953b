"""Plans between the styles: any module on devices of its own, on a quota beside others, or in
turns."""
