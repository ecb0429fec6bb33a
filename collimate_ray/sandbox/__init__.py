"""The way to a sandbox: the client of a node-local daemon, and how to find or start one. Source: design/WIRE.md."""

from collimate_ray.sandbox.client import CollimateClient, SandboxClient
from collimate_ray.sandbox.connect import connect

__all__ = ["CollimateClient", "SandboxClient", "connect"]
