"""restoration."""
