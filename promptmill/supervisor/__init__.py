"""Runs every process of one machine: the command lines, the embedded Redis, restarts, `promptmill up`."""
