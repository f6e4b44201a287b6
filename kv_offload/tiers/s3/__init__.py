"""Records as objects of a bucket."""
