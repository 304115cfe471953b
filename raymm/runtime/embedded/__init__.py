"""Embedded Ray: a cluster on this machine for one driver, all of whose processes end with it."""
