"""Atlas: dynamics."""
