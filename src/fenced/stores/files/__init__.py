"""Files and folders of a POSIX file system, with a mark beside each."""
