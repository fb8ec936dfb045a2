"""`python -m relax.launch`."""

from relax.launch.torchrun import main

if __name__ == "__main__":
    main()
