"""The recipe: six choices that state the regression problem a sequence layer solves."""
