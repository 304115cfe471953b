"""Files of buckets and web servers: found, read by ranges, and noticed when they change."""
