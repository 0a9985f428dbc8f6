"""Generated from protos/envfarm/v1 by protos/generate.py; do not edit."""
