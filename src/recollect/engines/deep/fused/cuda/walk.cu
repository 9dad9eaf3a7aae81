#include "walk.cuh"
