"""Follow a bad pointer."""

import ctypes

ctypes.string_at(0)
