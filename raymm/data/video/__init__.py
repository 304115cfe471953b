"""Video files: headers, chosen frames and sound tracks, through FFmpeg (PyAV)."""
