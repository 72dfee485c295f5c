"""`python -m glm5_next.launchers` is `glm5-next`."""

from glm5_next.launchers.cli import app

if __name__ == "__main__":
    app()
