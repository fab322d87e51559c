"""Every system call that Python has no function for lives below this package, and nowhere else."""
