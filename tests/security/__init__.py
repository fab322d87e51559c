"""The attack suite: attack programs, the host's truth about each, and a control for each."""
