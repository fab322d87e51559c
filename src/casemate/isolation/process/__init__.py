"""The process boundary: namespaces, mounts, seccomp, Landlock, control groups, one uid per sandbox."""
