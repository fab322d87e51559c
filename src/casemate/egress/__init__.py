"""The only way out: parsers of what a sandbox sends, the decision about it, and the relay."""
