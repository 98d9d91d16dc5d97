"""`python -m mars`: the command line, also as a module for `accelerate launch -m mars`."""

from mars.cli.main import run

if __name__ == "__main__":
    run()
