// A primary that accepts and gives each connection to one of its workers, in a message. Its own client asks over kept
// connections.
'use strict';
const cluster = require('cluster');
const http = require('http');
const crypto = require('crypto');

const digest = (bytes) => crypto.createHash('md5').update(bytes).digest('hex');

function ask(agent, port, body) {
    return new Promise((resolve, reject) => {
        const request = http.request({agent, host: '127.0.0.1', port, method: 'POST'}, (answer) => {
            const parts = [];
            answer.on('data', (part) => parts.push(part));
            answer.on('end', () => resolve(Buffer.concat(parts).toString()));
            answer.on('error', reject);
        });
        request.on('error', reject);
        request.end(body);
    });
}

async function rounds(agent, port, first, last) {
    const seen = new Set();
    for (let round = first; round < last; round++) {
        await Promise.all([...Array(8).keys()].map(async (i) => {
            const body = crypto.randomBytes(1 + ((i + round * 8) * 7919) % 100000);
            const [pid, answer] = (await ask(agent, port, body)).split(' ');
            if (answer !== digest(body)) throw new Error(`a body of ${body.length} bytes arrived changed`);
            seen.add(pid);
        }));
    }
    return seen;
}

if (cluster.isPrimary) {
    cluster.schedulingPolicy = cluster.SCHED_RR;
    const workers = [cluster.fork(), cluster.fork()];
    let listening = 0;
    cluster.on('listening', async (worker, address) => {
        if (++listening < workers.length) return;
        const agent = new http.Agent({keepAlive: true, maxSockets: 8});
        await rounds(agent, address.port, 0, 20);
        console.log(`port ${address.port}`);
        process.stdin.once('data', async () => {
            const seen = await rounds(agent, address.port, 20, 60);
            if (seen.size !== workers.length) throw new Error(`served by ${[...seen]}`);
            agent.destroy();
            for (const worker of workers) worker.kill();
            let left = workers.length;
            cluster.on('exit', () => {
                if (--left > 0) return;
                console.log('all well');
                process.exit(0);
            });
        });
    });
} else {
    http.createServer((request, response) => {
        const parts = [];
        request.on('data', (part) => parts.push(part));
        request.on('end', () => response.end(`${process.pid} ${digest(Buffer.concat(parts))}`));
    }).listen(0, '127.0.0.1');
}
