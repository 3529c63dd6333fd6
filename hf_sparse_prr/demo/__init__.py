"""What the command line's demo needs: a small real model, and a long text with a passkey in it."""
