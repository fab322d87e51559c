"""The command line. ``entry`` is what the installed command starts."""
