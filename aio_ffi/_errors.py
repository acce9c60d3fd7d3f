"""What can go wrong, in exceptions."""


class AioError(OSError):
    """An operation whose completion differs from its request.

    Attributes:
      operation: "read", "write", "sync", "open" or "reserve".
      path: The file; also `filename`.
      offset, length: What was asked for, in bytes.
      errno: The kernel's; `ENODATA` where a read ran past the end of the file.
      done: Bytes that were moved all the same, all pieces of the operation together.
    """

    def __init__(
        self, errno: int, message: str, *, operation: str, path: str, offset: int = 0, length: int = 0, done: int = 0
    ):
        super().__init__(errno, message, path)
        self.operation = operation
        self.path = path
        self.offset = offset
        self.length = length
        self.done = done


class AioWarning(UserWarning):
    """Something works, but by a slower way than it could; says which and how to get the better one."""
