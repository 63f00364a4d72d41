/* Preloaded into a process under test: counts its calls for files below some folders, and at the n-th of a kind kills
 * the process (a write half done) or lets it and the later ones fail. It sees the calls of Python and of Rust alike.
 * Also a clock of the day that jumps by years at every look. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { READ = 1, WRITE = 2, SYNC = 4, RENAME = 8, OPEN = 16, REMOVE = 32, MAKE = 64 };

static char folder[PATH_MAX];
static unsigned kinds;
static long seen[128], count, at = -1, failures_left;
static int error_number, log_fd = -1;
static unsigned long clock_state;

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

/* From now on count calls of these kinds below `where`; at the n-th (from 1) fail with `number`, or die if it is 0. */
void faults_arm(const char *where, unsigned which, long n, int number, long times, int log) {
    snprintf(folder, sizeof folder, "%s", where);
    memset(seen, 0, sizeof seen);
    count = 0, kinds = which, at = n, error_number = number, failures_left = times, log_fd = log;
}
long faults_seen(unsigned kind) { return seen[kind]; }
static void die(int number) { kill(getpid(), SIGKILL); }
/* Die at a moment, whatever the process is at. */
void faults_die_in(long microseconds) {
    struct itimerval once = {{0, 0}, {microseconds / 1000000, microseconds % 1000000 + 1}};
    signal(SIGALRM, die);
    setitimer(ITIMER_REAL, &once, NULL);
}
void faults_clock(unsigned long seed) { clock_state = seed; }

static int below(const char *path) { return path && *folder && !strncmp(path, folder, strlen(folder)); }

static const char *path_of(int fd, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, buffer, PATH_MAX - 1);
    if (length < 0) return NULL;
    buffer[length] = 0;
    return buffer;
}

/* 0: go on; 1: die; 2: fail. */
static int event(unsigned kind, const char *path) {
    if (!kinds || !below(path)) return 0;
    seen[kind]++;
    if (!(kinds & kind) || at < 0) return 0;
    count++;
    if (count < at) return 0;
    if (error_number == 0) {
        if (log_fd >= 0) dprintf(log_fd, "killed at call %u %s\n", kind, path);
        return 1;
    }
    if (failures_left-- <= 0) return 0;
    if (log_fd >= 0) dprintf(log_fd, "failed at call %u %s\n", kind, path);
    return 2;
}
static int check(unsigned kind, const char *path) {
    int verdict = event(kind, path);
    if (verdict == 1) kill(getpid(), SIGKILL);
    if (verdict == 2) errno = error_number;
    return verdict;
}
static int check_fd(unsigned kind, int fd) {
    char buffer[PATH_MAX];
    if (!kinds || fd == log_fd) return 0;
    return check(kind, path_of(fd, buffer));
}

ssize_t read(int fd, void *data, size_t size) { return check_fd(READ, fd) ? -1 : REAL(read)(fd, data, size); }
ssize_t pread64(int fd, void *data, size_t size, off64_t from) {
    return check_fd(READ, fd) ? -1 : REAL(pread64)(fd, data, size, from);
}
ssize_t write(int fd, const void *data, size_t size) {
    char buffer[PATH_MAX];
    int verdict = kinds && fd != log_fd ? event(WRITE, path_of(fd, buffer)) : 0;
    if (verdict == 1) {
        REAL(write)(fd, data, size / 2);
        kill(getpid(), SIGKILL);
    }
    if (verdict == 2) {
        errno = error_number;
        return -1;
    }
    return REAL(write)(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *parts, int number) {
    return check_fd(WRITE, fd) ? -1 : REAL(writev)(fd, parts, number);
}
ssize_t sendfile64(int out, int in, off64_t *from, size_t size) {
    return check_fd(READ, in) || check_fd(WRITE, out) ? -1 : REAL(sendfile64)(out, in, from, size);
}
int fsync(int fd) { return check_fd(SYNC, fd) ? -1 : REAL(fsync)(fd); }
int rename(const char *from, const char *to) { return check(RENAME, from) ? -1 : REAL(rename)(from, to); }
int unlink(const char *path) { return check(REMOVE, path) ? -1 : REAL(unlink)(path); }
int unlinkat(int fd, const char *path, int flags) { return check_fd(REMOVE, fd) ? -1 : REAL(unlinkat)(fd, path, flags); }
int rmdir(const char *path) { return check(REMOVE, path) ? -1 : REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) { return check(MAKE, path) ? -1 : REAL(mkdir)(path, mode); }
int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    if (flags & (O_WRONLY | O_RDWR | O_CREAT) ? check(MAKE, path) : check(OPEN, path)) return -1;
    return REAL(open64)(path, flags, mode);
}
int clock_gettime(clockid_t id, struct timespec *now) {
    int result = REAL(clock_gettime)(id, now);
    if (clock_state && id == CLOCK_REALTIME) {
        clock_state = clock_state * 6364136223846793005UL + 1442695040888963407UL;
        now->tv_sec += (long)(clock_state >> 34) - 536870912; /* 17 years either way */
    }
    return result;
}
