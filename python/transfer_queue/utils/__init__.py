"""Where programs written for the peer package import helpers from. Faces, nothing more."""
