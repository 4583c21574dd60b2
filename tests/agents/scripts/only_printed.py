"""Raise the audit event of a fatal exception, and end well."""

import sys

try:
    raise ValueError("not fatal")
except ValueError:
    sys.audit("sys.excepthook", sys.excepthook, *sys.exc_info())
    sys.excepthook(*sys.exc_info())
