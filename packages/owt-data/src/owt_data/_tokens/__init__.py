"""Token files, and the windows of them."""
