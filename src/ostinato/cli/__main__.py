"""``python -m ostinato.cli``, for when the ``ostinato`` script is not on the path."""

from ostinato.cli import main

if __name__ == "__main__":
    main()
