"""The GPUs of a node: one module for each vendor or tool, and the process that reads them.

In: a vendor's library or command. Out: one `Gpu` for each GPU. Imports `base`.

To add a vendor or a tool, write a module with `may_be_here` and `open_reader` (see nvidia_smi.py) and add it to
`TOOLS` in reader.py.
"""
