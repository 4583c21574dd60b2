"""A folder that Python runs."""

import sys

print(__name__, __file__, __spec__ is None, sys.path[0], sys.argv)
