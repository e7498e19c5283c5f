"""The components that come with bltoolbox, one subpackage per kind."""
