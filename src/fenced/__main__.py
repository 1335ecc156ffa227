"""`python -m fenced` is the `fenced` command."""

from fenced.cli import main

if __name__ == "__main__":
    main()
