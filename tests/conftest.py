"""Makes `tests` a package at the repository root, so that every test can import `tests.reference`."""
