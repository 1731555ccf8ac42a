"""Small wrong changes to the package, each with the tests that are to find it."""
