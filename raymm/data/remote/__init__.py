"""Data files in buckets and on web servers: listing, range reads, and detection of changed files.
"""
