"""The rewrites that `canonicalize` is made of: one idea a module, each a set of rules over single calls."""
