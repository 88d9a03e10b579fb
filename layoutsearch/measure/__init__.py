"""Devices, builds, timing, and the record of what was measured."""
