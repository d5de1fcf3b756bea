"""Shared by all packages: errors, files, options, digests, tables, memory."""
