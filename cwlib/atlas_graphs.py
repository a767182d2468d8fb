"""Atlas: graphs."""
