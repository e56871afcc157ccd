"""`python -m gockpt_jax` is the command `gockpt_jax`."""

from gockpt_jax.cli.main import main

if __name__ == "__main__":
    main(prog_name="gockpt_jax")
