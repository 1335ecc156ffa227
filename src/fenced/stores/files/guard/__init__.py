"""Files and folders of a POSIX file system, guarded."""
