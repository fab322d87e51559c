"""The one policy: what a sandbox may see, change and use, as data.

``model`` holds the types, ``load`` finds and merges the layers, ``tools`` and ``environment`` turn the
caller's PATH and variables into what may enter. Nothing here starts a process or changes a file, but for
``trust``, which keeps the operator's hashes.
"""
