"""Fail with a chained exception, a few frames down."""


def inner() -> None:
    raise ValueError("the reason\nhas two lines \u00e9")


def outer() -> None:
    try:
        inner()
    except ValueError as error:
        raise RuntimeError("the failure") from error


print("before")
outer()
