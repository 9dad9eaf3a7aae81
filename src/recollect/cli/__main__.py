"""`python -m recollect.cli`: the same commands, for launchers that take a module."""

from recollect_command import main

if __name__ == "__main__":
    main()
