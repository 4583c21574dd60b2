raise RuntimeError("while it is imported")
