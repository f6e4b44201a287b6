"""Records as values of a Redis or Valkey server or cluster."""
