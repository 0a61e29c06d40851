"""``python -m lpq`` is ``lpq``."""

from lpq.cli import main

if __name__ == "__main__":
    main()
