"""Records as files below a directory."""
