"""Executors: how a plan reaches the devices that run it."""
