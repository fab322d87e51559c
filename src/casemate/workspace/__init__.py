"""The workspace's view after the command: what it changed, what of that is safe, and applying it."""
