"""`python -m zinf_jax.cli` is `zinf`."""

from zinf_jax.cli import main

if __name__ == "__main__":
    main()
