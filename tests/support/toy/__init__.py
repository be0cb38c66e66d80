"""A fourth model family, as small as one can be: this folder and one registry entry are all that the package needs to know of it."""
