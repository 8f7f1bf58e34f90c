// MPI processes that exchange messages of all sizes, in a ring and all with all, and check what they get.
// Usage: exchange SECONDS; the first process prints messages per second.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { LARGEST = 4 << 20 };

static void fill(uint32_t *to, int words, uint32_t seed) {
    for (int i = 0; i < words; i++)
        to[i] = seed * 2654435761u + i;
}

static void check(const uint32_t *got, int words, uint32_t seed) {
    for (int i = 0; i < words; i++) {
        if (got[i] != seed * 2654435761u + i) {
            fprintf(stderr, "word %d of %d of message %u is another\n", i, words, seed);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
}

int main(int argc, char **argv) {
    int rank, size;
    long count = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    double begin = MPI_Wtime(), end = begin + (argc > 1 ? atof(argv[1]) : 1);
    uint32_t *out = malloc(LARGEST * sizeof *out), *in = malloc(LARGEST * sizeof *in);
    int right = (rank + 1) % size, left = (rank + size - 1) % size, goes_on = 1;
    for (uint32_t round = 0; goes_on; round++) {
        // Mostly small ones; 4 MB and more now and then.
        int words = round % 200 == 199 ? 1000000 + round : round % 20 == 19 ? 20000 + round % 5000 : 1 + round * 7 % 900;
        fill(out, words, round * size + rank);
        MPI_Sendrecv(out, words, MPI_UINT32_T, right, 0, in, LARGEST, MPI_UINT32_T, left, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        check(in, words, round * size + left);
        count++;
        if (round % 50 == 0) {
            for (int to = 0; to < size; to++)
                fill(out + to * 3000, 3000, round * size * size + rank * size + to);
            MPI_Alltoall(out, 3000, MPI_UINT32_T, in, 3000, MPI_UINT32_T, MPI_COMM_WORLD);
            for (int from = 0; from < size; from++)
                check(in + from * 3000, 3000, round * size * size + from * size + rank);
            count += size;
            goes_on = MPI_Wtime() < end;
            MPI_Bcast(&goes_on, 1, MPI_INT, 0, MPI_COMM_WORLD);
        }
    }
    if (rank == 0) {
        printf("%.0f\n", count * size / (MPI_Wtime() - begin));
        fflush(stdout);
    }
    MPI_Finalize();
    return 0;
}
