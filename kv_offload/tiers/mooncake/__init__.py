"""Records as objects of a Mooncake Store."""
